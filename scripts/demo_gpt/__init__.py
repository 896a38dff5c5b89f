"""A small GPT trained by peers on localhost that share only gradients; `scripts/demo` runs it."""
