"""When a token may leave: exit layers and heads, confidence measures, and the policy that joins them."""
