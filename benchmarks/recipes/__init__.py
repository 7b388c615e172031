"""What each way of training exits is worth: quality against depth and speed, on two tasks."""
