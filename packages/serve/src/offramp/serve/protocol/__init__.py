"""The OpenAI protocol: requests, responses, errors, and the service that turns one into the other.

Nothing here knows of a web server: a front hands over a path and a body and takes the pieces of a reply.
"""
