"""What tests of split models share: small models, Megatron's command line, bases of tests in several processes."""
