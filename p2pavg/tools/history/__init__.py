"""The history of a run, checked and replayed without the program that trained."""
