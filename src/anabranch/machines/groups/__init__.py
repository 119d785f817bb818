"""The group coordinator: pure state machines of the consumer and the classic group protocol."""
