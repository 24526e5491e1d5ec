"""The ops in ``torch.ops.sdfastgn``, which exported models and compiled code name."""

import pytest
import torch

# Importing an op's module registers it.
from sdfastgn.kernels.batch_norm import op as _batch_norm  # noqa: F401
from sdfastgn.kernels.channel_norm import op as _channel_norm  # noqa: F401
from sdfastgn.kernels.geglu import op as _geglu  # noqa: F401
from sdfastgn.kernels.group_norm import op as _group_norm  # noqa: F401
from sdfastgn.kernels.layer_norm import op as _layer_norm  # noqa: F401
from sdfastgn.kernels.statistics import op as _statistics  # noqa: F401
from sdfastgn.kernels.upsample import nearest as _nearest  # noqa: F401

SCHEMAS = (
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? add_bias, float "
    "eps, ScalarType? out_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    "add_with_statistics(Tensor x, Tensor residual, Tensor? bias, float scale) -> (Tensor, Tensor)",
    "batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mean, Tensor? var, "
    "float eps, float momentum, str activation) -> (Tensor, Tensor, Tensor)",
    "batch_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, "
    "Tensor? residual, float eps, str activation, bool training, bool dx, bool dweight, bool dbias, "
    "bool dresidual) -> Tensor[]",
    "cat_with_statistics(Tensor a, Tensor b) -> (Tensor, Tensor)",
    "channel_norm(Tensor x, Tensor? weight, Tensor? bias, float scale, float eps, str activation) -> Tensor",
    "channel_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, float scale, float eps, "
    "str activation, bool dx, bool dweight, bool dbias) -> Tensor[]",
    "channel_statistics(Tensor x) -> Tensor",
    "geglu(Tensor x, Tensor? bias) -> Tensor",
    "geglu_backward(Tensor dy, Tensor x, Tensor? bias, ScalarType? dx, ScalarType? dbias) -> Tensor[]",
    "group_norm(Tensor x, int num_groups, Tensor? weight, Tensor? bias, float eps, str activation, "
    "Tensor? shift, Tensor? ada_scale, Tensor? ada_shift, Tensor? statistics, bool tokens, "
    "ScalarType? out_dtype) -> (Tensor, Tensor, Tensor)",
    "group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias,"
    " Tensor? shift, Tensor? ada_scale, Tensor? ada_shift, int num_groups, float eps, str activation,"
    " bool tokens, bool dx, bool dweight, bool dbias, bool dshift, bool dada_scale, bool dada_shift) "
    "-> Tensor[]",
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype) -> (Tensor,"
    " Tensor, Tensor)",
    "layer_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor centre, Tensor rstd, Tensor? "
    "weight, float eps, ScalarType? dx, ScalarType? dweight, ScalarType? dbias, ScalarType? dadded) "
    "-> Tensor[]",
    "upsample_nearest_2x(Tensor x) -> Tensor",
    "upsample_nearest_2x_backward(Tensor dy) -> Tensor",
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.partition("(")[0])
def test_the_schema_of_an_op_stays(schema):
    op = getattr(torch.ops.sdfastgn, schema.partition("(")[0]).default
    assert str(op._schema) == f"sdfastgn::{schema}"
