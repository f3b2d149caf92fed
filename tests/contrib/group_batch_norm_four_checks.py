"""Checks of group norms that differ between four processes and two."""

from tests.contrib import group_batch_norm_checks as checks

CHECKS = {
    name: checks.CHECKS[name]
    for name in (
        "nhwc_pairs",
        "nhwc_addend_and_relu",
        "nhwc_addend_and_relu_pairs",
        "nhwc_an_empty_batch",
        "grouped",
        "grouped_pairs",
        "compiled_name_bnp",
        "compiled_name_cudnn_gbn_lib",
        "sizes_that_do_not_fit",
        "one_group_for_all_norms_of_a_size",
        "training_is_that_of_one_process",
    )
}
