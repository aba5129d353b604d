"""The examples in the package: the tiny chat model that the first command trains, and images.

They are part of the package, so that they run wherever it is installed. The other examples are in
the repository.
"""
