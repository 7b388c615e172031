"""The OpenAI API over HTTP: a strict front door, and behind it whatever answers."""
