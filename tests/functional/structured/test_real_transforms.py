import pytest
import torch

from lightning_struct.functional.structured.fourier import as_pair, multiplied, real_irfft, real_rfft


@pytest.mark.parametrize("length", [1, 2, 7, 12, 30, 49, 128])
def test_transforms_are_those_of_torch(length):
    torch.manual_seed(0)
    x = torch.randn(3, length, dtype=torch.float64)
    expected = torch.fft.rfft(x)
    torch.testing.assert_close(torch.complex(*real_rfft(x)), expected)
    torch.testing.assert_close(real_irfft(as_pair(expected), length), x)
    torch.testing.assert_close(torch.complex(*multiplied(as_pair(expected), as_pair(expected))), expected.square())
