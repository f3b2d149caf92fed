"""`apex bench`: the cases of `apex._bench` chosen, run and shown."""
