"""What an answer is worth: scores, and the built-in reward functions. Pure, and without torch or numpy."""
