"""Connections to other libraries, one file per library, named after it. A library is imported only when it is used."""
