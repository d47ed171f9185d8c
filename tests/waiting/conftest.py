"""No doctests here: to import the stand-in device registers it in the process of the tests."""

collect_ignore = ["standin.py", "cases.py"]
