"""Between values and protobuf messages; nothing here calls."""
