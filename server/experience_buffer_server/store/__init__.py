"""What is durable: the store's interface, and the engines behind it."""
