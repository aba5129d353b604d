"""GSM8K, grade-school mathematics: the data set in the form the trainer reads."""
