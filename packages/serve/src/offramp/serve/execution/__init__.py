"""The one loop over segments, and the policies that are rules on its rows."""
