"""The exchange between ranks."""
