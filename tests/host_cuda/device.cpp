// cuda:0 in host memory, for a CPU build of torch. Each operator runs on the CPU, on aliases of its tensors; a tensor of
// the CPU among them raises, as on a GPU. Memory of `empty` is full of NaN: what is read before it is written shows.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

#include "../../benchmarks/fake_cuda/shim.cpp" // that there is a device

namespace {
using namespace c10;
const Device HOST(DeviceType::CPU), GPU(DeviceType::CUDA, 0);

struct Memory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    void* found = nullptr;
    TORCH_CHECK(!bytes || !posix_memalign(&found, 512, bytes), "no memory");
    if (bytes) memset(found, 0xff, bytes);
    return {found, found, &std::free, GPU};
  }
  DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} memory;

DataPtr memory_of(const at::Tensor& tensor, Device device) { // and keeps the tensor
  auto deleter = [](void* held) { delete static_cast<at::Tensor*>(held); };
  return {tensor.storage().mutable_data(), new at::Tensor(tensor), deleter, device};
}

at::Tensor alias(const at::Tensor& of, Device device) { // one tensor on the memory of another
  Allocator* more = device.is_cuda() ? static_cast<Allocator*>(&memory) : GetCPUAllocator();
  Storage storage(Storage::use_byte_size_t(), of.storage().nbytes(), memory_of(of, device), more, true);
  DispatchKeySet keys(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, of.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
  return made;
}

void take_over(const at::Tensor& tensor, const at::Tensor& resized) { // what an operator did with its `out`
  if (tensor.storage().data() != resized.storage().data()) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    storage->set_data_ptr(memory_of(resized, GPU));
    storage->set_nbytes(resized.storage().nbytes());
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(resized.sizes(), resized.strides(), resized.storage_offset());
}

void on_host(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;
  bool asked_for_host = false;
  auto index_to_host = [&](const at::Tensor& tensor) { // which may be one of the CPU
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [own, other] : aliases)
      if (own.is_same(tensor)) return other;
    aliases.emplace_back(tensor, alias(tensor, HOST));
    return aliases.back().second;
  };
  auto to_host = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || tensor.is_cuda() || !tensor.dim(), name, ": a tensor of the CPU beside those of cuda:0");
    return index_to_host(tensor);
  };
  auto back = [&](const at::Tensor& tensor) {
    for (auto& [own, other] : aliases)
      if (other.is_same(tensor)) {
        if (own.sizes() != other.sizes() || own.strides() != other.strides()) take_over(own, other);
        return own;
      }
    return tensor.defined() && tensor.is_cpu() && !asked_for_host ? alias(tensor, GPU) : tensor;
  };
  auto each = [](IValue& value, auto& change) {
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& one : value.toTensorVector()) made.push_back(change(one));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const auto& one : value.toOptionalTensorVector())
        made.push_back(one ? std::optional(change(*one)) : std::nullopt);
      value = made;
    }
  };
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isOptionalTensorList()) {
      each(value, index_to_host);
    } else {
      each(value, to_host);
    }
    if (value.isDevice()) {
      asked_for_host = value.toDevice().is_cpu();
      value = HOST;
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) each((*stack)[i], back);
}

using Dtype = std::optional<ScalarType>;
ScalarType chosen(Dtype dtype) { return dtype.value_or(at::get_default_dtype_as_scalartype()); }
const DispatchKeySet KEYS(DispatchKey::CUDA);

at::Tensor empty(IntArrayRef size, Dtype dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>,
                 std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, chosen(dtype), format);
}
at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, std::optional<Layout>,
                         std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, chosen(dtype));
}
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  at::AutoDispatchBelowAutograd below;
  auto host = [](const at::Tensor& tensor) { return tensor.is_cuda() ? alias(tensor, HOST) : tensor; };
  host(to).copy_(host(from));
  return to;
}
const at::Tensor& resize_(const at::Tensor& tensor, IntArrayRef size, std::optional<MemoryFormat>) {
  auto resized = alias(tensor, HOST);
  const auto before = resized.storage().nbytes();
  resized.resize_(size);
  if (const auto now = resized.storage().nbytes(); now > before)
    memset(static_cast<char*>(resized.storage().mutable_data()) + before, 0xff, now - before);
  take_over(tensor, resized);
  return tensor;
}
at::Tensor& set_(at::Tensor& tensor, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return tensor;
}
at::Tensor& set_storage_(at::Tensor& tensor, Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_(tensor, std::move(storage), 0, {count}, {1});
}
void record_stream(at::Tensor&, Stream) {}

struct Here {
  Here() { SetAllocator(DeviceType::CUDA, &memory, 255); }
} here;
} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage_));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  for (auto name : {"convolution", "convolution_backward"}) // else torch chooses a library for the GPU
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}
