"""All SQL of Tokenlake, as text: views, audits and reads, one statement a file.

`read("views/rollouts")` gives a file's text, `names("views")` the names of a folder. Nothing here runs SQL.
"""

from tokenlake.sql.text import names, read

__all__ = ["names", "read"]
