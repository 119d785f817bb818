"""What our producer and consumer decide."""
