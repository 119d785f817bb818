"""Producer, Consumer and Admin, as asyncio and as plain synchronous classes."""
