// Registers a device without hardware with torch: memory of its own, operations by the CPU's kernels.
// As on CUDA, backward runs in a thread of the device, tensors of two devices are refused, and memory can run out.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {
using at::Tensor;
using c10::IntArrayRef;
using Maybe = std::optional<Tensor>;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr size_t HEAD = 512;  // bytes before a tensor's own: their number
std::atomic<long> used{0}, peak{0}, waits{0}, operations{0};

struct Memory final : c10::Allocator {
  static void release(void* block) {
    used -= *static_cast<size_t*>(block);
    std::free(block);
  }
  c10::DataPtr allocate(size_t bytes) override {
    static const char* limit = std::getenv("STANDIN_MEMORY");
    TORCH_CHECK_WITH(OutOfMemoryError, !limit || used + static_cast<long>(bytes) <= std::atol(limit),
                     "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
    auto* block = static_cast<size_t*>(std::aligned_alloc(HEAD, (bytes + 2 * HEAD - 1) / HEAD * HEAD));
    *block = bytes;
    if (long now = used += bytes; now > peak) peak = now;
    char* data = reinterpret_cast<char*>(block) + HEAD;
    std::memset(data, 0xFF, bytes);  // NaN: what nobody has written shows
    return {data, block, &release, c10::Device(TYPE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
Hooks hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  explicit Guard(c10::DeviceType = TYPE) {}
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
  c10::Device getDevice() const override { return {TYPE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream only() const { return c10::Stream(c10::Stream::DEFAULT, c10::Device(TYPE, 0)); }
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The same memory as a tensor of the CPU.
Tensor host(const Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.numel() ? t.data_ptr() : nullptr, t.sizes(), t.strides(),
                       t.options().device(at::kCPU).requires_grad(false));
}
Maybe host(const Maybe& t) { return t && t->defined() ? Maybe(host(*t)) : std::nullopt; }
Tensor device(const Tensor& t) { return t.defined() ? t.to(c10::Device(TYPE, 0)) : t; }

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(type), format);
}
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(type));
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  if (to.is_cpu()) ++waits;
  host(to).copy_(host(self));
  return to;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<Tensor&>(to).resize_(self.sizes());
  host(to).copy_(host(self));
  return to;
}
at::Scalar scalar_of(const Tensor& self) {
  ++waits;
  return at::_local_scalar_dense(host(self));
}
Tensor& set_storage(Tensor& t, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
Tensor& set_empty(Tensor& t) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return set_storage(t, storage, 0, {0}, {1});
}
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> at) {
  return at::cpu::as_strided_symint(t, size, stride, at);
}

bool may_take_data_of(const Tensor&, const Tensor&) { return true; }  // a parameter may move to the CPU and back

Tensor conv(const Tensor& x, const Tensor& w, const Maybe& bias, IntArrayRef stride, IntArrayRef padding,
            IntArrayRef dilation, bool transposed, IntArrayRef output, int64_t groups) {
  return device(at::convolution(host(x), host(w), host(bias), stride, padding, dilation, transposed, output, groups));
}
std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& gradient, const Tensor& x, const Tensor& w,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output,
    int64_t groups, std::array<bool, 3> wanted) {
  auto [a, b, c] = at::convolution_backward(host(gradient), host(x), host(w), IntArrayRef{w.size(0)}, stride, padding,
                                            dilation, transposed, output, groups, wanted);
  return {device(a), device(b), device(c)};
}
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Maybe& w, const Maybe& b, const Maybe& mean,
                                              const Maybe& variance, bool training, double momentum, double epsilon) {
  auto [y, m, i] = at::native_batch_norm(host(x), host(w), host(b), host(mean), host(variance), training, momentum,
                                         epsilon);
  return {device(y), device(m), device(i)};
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  bool here = false, elsewhere = false;
  auto look = [&](const Tensor& t) {
    if (t.defined()) (t.device().type() == TYPE ? here : elsewhere) |= t.device().type() == TYPE || t.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) look(t);
  }
  TORCH_CHECK(!(here && elsewhere) || name.find("aten::index") == 0, name, " has tensors of two devices");
  ++operations;
  const bool reads = name == "aten::nonzero" || name == "aten::masked_select" || name == "aten::equal";
  const long before = waits + reads;
  at::native::cpu_fallback(op, stack);
  waits = before;  // its own copies are not the program's
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", may_take_data_of);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", scalar_of);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_", set_empty);
  m.impl("as_strided", as_strided);
  m.impl("view", [](const Tensor& t, IntArrayRef size) { return at::native::view(t, size); });
  m.impl("_reshape_alias", [](const Tensor& t, IntArrayRef a, IntArrayRef b) { return at::native::_reshape_alias(t, a, b); });
  m.impl("unfold", [](const Tensor& t, int64_t d, int64_t n, int64_t s) { return at::native::unfold(t, d, n, s); });
  m.impl("resize_", [](const Tensor& t, IntArrayRef size, std::optional<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(t, size, format);
  });
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", conv);
  m.impl("convolution_backward_overrideable", conv_backward);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("used", [] { return used.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = used.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("operations", [] { return operations.load(); });
}
