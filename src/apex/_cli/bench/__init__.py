"""`apex bench`: choose, run and show the cases of `apex._bench`."""
