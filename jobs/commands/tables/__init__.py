"""Commands about the tables as a whole: asked, checked, kept small, copied, and filled."""
