"""What is inside of a payload, made small and harmless for people: texts, tokens, images. Pure."""
