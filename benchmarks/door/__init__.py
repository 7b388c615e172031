"""The whole door under load: the commands that open one, and a client that sees every octet."""
