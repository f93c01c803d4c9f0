"""Composer's and mosaicml-streaming's public names over Hocket's packages. None is offered yet."""
