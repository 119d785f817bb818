"""The consumer protocol (KIP-848): groups whose members are moved one by one, each at its own pace."""
