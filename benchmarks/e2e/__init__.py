"""What early exit is worth on a narrow task: E2E NLG, from training to quality against depth."""
