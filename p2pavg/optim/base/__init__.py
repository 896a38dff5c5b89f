"""The common parts of all optimizers: arguments, recipes, lineages, reports."""
