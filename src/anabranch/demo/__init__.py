"""The main job: flights through an elastic topic, read by Spark."""
