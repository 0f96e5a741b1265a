// What tch does not offer of libtorch, as plain C functions: see shim.rs for each one's contract.
//
// Nothing may cross the border: every function catches all exceptions and returns their text
// (malloc'd, freed by the caller), or null when it worked. Tensors are passed as `at::Tensor*`,
// which is what tch's handles are; a tensor that is handed out is new and owned by the caller.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Version.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

template <typename Body>
char* guarded(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    // Without the C++ stack, which helps nobody who reads a terminal.
    return strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return strdup(error.what());
  } catch (...) {
    return strdup("an exception of unknown type");
  }
}

std::vector<at::Tensor> list(at::Tensor* const* tensors, size_t count) {
  std::vector<at::Tensor> result;
  result.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    result.push_back(tensors[i] == nullptr ? at::Tensor() : *tensors[i]);
  }
  return result;
}

// ---- gradient hooks ----

// An error of Rust's on its way through the autograd engine. Copies share it: whoever catches the
// exception takes the error out, and if nobody does it is dropped with the last copy.
class HookError : public std::runtime_error {
 public:
  HookError(const char* text, void* error, void (*drop)(void*))
      : std::runtime_error(text), error_(std::make_shared<Owned>(error, drop)) {}

  void* take() const {
    return error_->pointer.exchange(nullptr);
  }

 private:
  struct Owned {
    Owned(void* pointer, void (*drop)(void*)) : pointer(pointer), drop(drop) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    ~Owned() {
      if (void* left = pointer.load()) {
        drop(left);
      }
    }
    std::atomic<void*> pointer;
    void (*drop)(void*);
  };
  std::shared_ptr<Owned> error_;
};

struct HookTable {
  void* (*call)(void* data, char** text);
  void (*release)(void* data);
  void (*drop_error)(void* error);
};

class RustHook : public torch::autograd::FunctionPostHook {
 public:
  RustHook(void* data, HookTable table) : data_(data), table_(table) {}
  RustHook(const RustHook&) = delete;
  RustHook& operator=(const RustHook&) = delete;
  ~RustHook() override {
    table_.release(data_);
  }

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list&) override {
    char* text = nullptr;
    if (void* error = table_.call(data_, &text)) {
      HookError thrown(text == nullptr ? "a gradient hook failed" : text, error, table_.drop_error);
      std::free(text);
      throw thrown;
    }
    return outputs;
  }

 private:
  void* data_;
  HookTable table_;
};

// ---- gradients of one's own ----

struct FunctionTable {
  void* (*backward)(void* data, const at::Tensor* gradient, at::Tensor** results, size_t count, char** text);
  void (*release)(void* data);
  void (*drop_error)(void* error);
};

// A step of the graph whose gradient Rust works out.
class RustNode : public torch::autograd::Node {
 public:
  RustNode(void* data, FunctionTable table) : data_(data), table_(table) {}
  RustNode(const RustNode&) = delete;
  RustNode& operator=(const RustNode&) = delete;
  ~RustNode() override {
    release_variables();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TORCH_CHECK(data_ != nullptr, "backward through a graph that an earlier backward has freed");
    std::vector<at::Tensor*> results(num_outputs(), nullptr);
    char* text = nullptr;
    void* error = table_.backward(data_, &gradients.at(0), results.data(), results.size(), &text);
    torch::autograd::variable_list out;
    for (at::Tensor* result : results) {
      const std::unique_ptr<at::Tensor> owned(result);
      out.push_back(owned ? *owned : at::Tensor());
    }
    if (error != nullptr) {
      HookError thrown(text == nullptr ? "a gradient of one's own failed" : text, error, table_.drop_error);
      std::free(text);
      throw thrown;
    }
    return out;
  }

  std::string name() const override {
    return "RustBackward";
  }

  void release_variables() override {
    if (data_ != nullptr) {
      table_.release(std::exchange(data_, nullptr));
    }
  }

 private:
  void* data_;
  FunctionTable table_;
};

// ---- memory ----

struct Counters {
  uint64_t* live;
  uint64_t* peak;
};

constexpr int64_t kNoCard = -1;
// Before the caller's bytes: 64 of them, libtorch's alignment for vector loads.
struct alignas(64) Header {
  int64_t card;
  uint64_t bytes;
};
static_assert(sizeof(Header) == 64);

std::atomic<int64_t> process_card{0};
thread_local int64_t thread_card = kNoCard;

class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator(c10::Allocator* inner, std::vector<Counters> cards)
      : inner_(inner), cards_(std::move(cards)) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &release, c10::Device(c10::DeviceType::CPU)};
    }
    TORCH_CHECK(bytes <= SIZE_MAX - sizeof(Header), "can't allocate memory: ", bytes, " bytes");
    auto* header = static_cast<Header*>(inner_->raw_allocate(bytes + sizeof(Header)));
    const int64_t wanted = thread_card == kNoCard ? process_card.load(std::memory_order_relaxed) : thread_card;
    const bool known = wanted >= 0 && static_cast<size_t>(wanted) < cards_.size();
    new (header) Header{known ? wanted : kNoCard, bytes};
    if (known) {
      add(cards_[wanted], bytes);
    }
    void* data = header + 1;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  static CountingAllocator* installed;

 private:
  static void add(const Counters& card, uint64_t bytes) {
    const uint64_t live = __atomic_add_fetch(card.live, bytes, __ATOMIC_RELAXED);
    uint64_t peak = __atomic_load_n(card.peak, __ATOMIC_RELAXED);
    while (peak < live &&
           !__atomic_compare_exchange_n(card.peak, &peak, live, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

  // A block remembers its card, so that it is counted down there whichever thread frees it.
  static void release(void* data) {
    if (data == nullptr) {
      return;
    }
    Header* header = static_cast<Header*>(data) - 1;
    if (header->card != kNoCard) {
      __atomic_sub_fetch(installed->cards_[header->card].live, header->bytes, __ATOMIC_RELAXED);
    }
    installed->inner_->raw_deallocate(header);
  }

  c10::Allocator* inner_;
  std::vector<Counters> cards_;
};

CountingAllocator* CountingAllocator::installed = nullptr;

} // namespace

extern "C" {

// ---- CUDA devices ----

// Makes this the calling thread's device, and says whether libtorch would compute in its default stream.
char* dvd_cuda_enter(int64_t device, bool* default_stream) {
  return guarded([&] {
    const auto index = static_cast<c10::DeviceIndex>(device);
    at::accelerator::setDeviceIndex(index);
    *default_stream = at::accelerator::getCurrentStream(index).id() == 0;
  });
}

// Sends the calling thread's work to a stream that libtorch did not make. The id of such a stream is its
// address: that is how libtorch's getStreamFromExternal makes one, whose symbol a CPU machine lacks.
char* dvd_cuda_work_in(int64_t device, void* stream) {
  return guarded([&] {
    const c10::Device place(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    at::accelerator::setDeviceIndex(place.index());
    at::accelerator::setCurrentStream(
        c10::Stream(c10::Stream::UNSAFE, place, reinterpret_cast<c10::StreamId>(stream)));
  });
}

// Bytes of the caching allocator that tensors use now, and used at most since the last reset.
char* dvd_cuda_memory(int64_t device, uint64_t* live, uint64_t* peak) {
  return guarded([&] {
    const auto stats = at::accelerator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto& bytes = stats.allocated_bytes[0];  // over all pools
    *live = static_cast<uint64_t>(bytes.current);
    *peak = static_cast<uint64_t>(bytes.peak);
  });
}

char* dvd_cuda_reset_peak(int64_t device) {
  return guarded([&] { at::accelerator::resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
}

// ---- gradients ----

struct GradientHook {
  // A parameter holds its accumulator weakly: without this the hook would die with the first graph.
  std::shared_ptr<torch::autograd::Node> accumulator;
};

// `data` is released once: by the hook when it dies, or here on failure.
char* dvd_hook_add(const at::Tensor* param, void* data, HookTable table, GradientHook** out) {
  return guarded([&] {
    auto hook = std::make_unique<RustHook>(data, table);
    TORCH_CHECK(param->defined() && param->is_leaf() && param->requires_grad(),
                "a gradient hook needs a leaf that requires a gradient");
    auto kept = std::make_unique<GradientHook>();
    kept->accumulator = torch::autograd::impl::grad_accumulator(*param);
    kept->accumulator->add_post_hook(std::move(hook));
    *out = kept.release();
  });
}

void dvd_hook_free(GradientHook* hook) {
  delete hook;
}

// Which of the hooked parameters the graph of `loss` reaches, without running it.
char* dvd_graph_reaches(const at::Tensor* loss, GradientHook* const* hooks, size_t count, bool* reached) {
  return guarded([&] {
    std::unordered_set<torch::autograd::Node*> seen;
    std::vector<torch::autograd::Node*> open;
    const auto visit = [&](const std::shared_ptr<torch::autograd::Node>& node) {
      if (node && seen.insert(node.get()).second) {
        open.push_back(node.get());
      }
    };
    if (loss->requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(*loss).function);
    }
    while (!open.empty()) {
      const auto* node = open.back();
      open.pop_back();
      for (const auto& edge : node->next_edges()) {
        visit(edge.function);
      }
    }
    for (size_t i = 0; i < count; ++i) {
      reached[i] = seen.count(hooks[i]->accumulator.get()) > 0;
    }
  });
}

char* dvd_backward(at::Tensor* const* outputs, at::Tensor* const* gradients, size_t count, void** hook_error) {
  return guarded([&] {
    try {
      torch::autograd::backward(list(outputs, count), list(gradients, count));
    } catch (const HookError& error) {
      *hook_error = error.take();
      throw;
    }
  });
}

// Makes `output` a function of `inputs`. `data` is released once: by the node, or here on failure.
char* dvd_function(at::Tensor* const* inputs, size_t count, at::Tensor* output, void* data, FunctionTable table) {
  return guarded([&] {
    const std::shared_ptr<torch::autograd::Node> node(new RustNode(data, table), torch::autograd::deleteNode);
    for (const at::Tensor& input : list(inputs, count)) {
      node->add_next_edge(input.requires_grad() ? torch::autograd::impl::gradient_edge(input)
                                                : torch::autograd::Edge());
    }
    TORCH_CHECK(!output->requires_grad(), "the output of a function of one's own has a graph already");
    torch::autograd::create_gradient_edge(*output, node);
  });
}

char* dvd_grad(const at::Tensor* param, at::Tensor** out) {
  return guarded([&] {
    const at::Tensor& gradient = param->grad();
    *out = gradient.defined() ? new at::Tensor(gradient) : nullptr;
  });
}

char* dvd_set_grad(at::Tensor* param, const at::Tensor* gradient) {
  return guarded([&] {
    if (gradient != nullptr && gradient->defined()) {
      TORCH_CHECK(gradient->sizes() == param->sizes(), "a gradient of shape ", gradient->sizes(),
                  " does not fit a parameter of shape ", param->sizes());
      TORCH_CHECK(gradient->device() == param->device() && gradient->scalar_type() == param->scalar_type(),
                  "a gradient needs its parameter's device and type");
      param->mutable_grad() = *gradient;
    } else {
      param->mutable_grad().reset();
    }
  });
}

// ---- optimisers ----

char* dvd_sgd(at::Tensor* const* params, at::Tensor* const* grads, at::Tensor* const* momenta, size_t count,
              double lr, double momentum, double weight_decay, bool first_step) {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    const auto buffers = momenta == nullptr ? std::vector<at::Tensor>() : list(momenta, count);
    at::_fused_sgd_(list(params, count), list(grads, count), buffers, weight_decay, momentum, lr,
                    /*dampening=*/0.0, /*nesterov=*/false, /*maximize=*/false, first_step);
  });
}

char* dvd_adam(at::Tensor* const* params, at::Tensor* const* grads, at::Tensor* const* means,
               at::Tensor* const* squares, at::Tensor* const* steps, size_t count, double lr, double beta1,
               double beta2, double weight_decay, double eps) {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    const auto counted = list(steps, count);
    at::_foreach_add_(counted, at::Scalar(1));
    at::_fused_adam_(list(params, count), list(grads, count), list(means, count), list(squares, count), {},
                     counted, lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false, /*maximize=*/false);
  });
}

// ---- memory ----

char* dvd_memory_install(const Counters* cards, size_t count) {
  return guarded([&] {
    TORCH_CHECK(CountingAllocator::installed == nullptr, "the counting allocator is already installed");
    c10::Allocator* inner = c10::GetCPUAllocator();
    TORCH_CHECK(inner->raw_deleter() != nullptr, "the CPU allocator in place has no raw interface to build on");
    // Never freed: blocks may outlive everything else in the process.
    CountingAllocator::installed = new CountingAllocator(inner, std::vector<Counters>(cards, cards + count));
    c10::SetCPUAllocator(CountingAllocator::installed, /*priority=*/1);
  });
}

void dvd_memory_set_process_card(int64_t card) {
  process_card.store(card, std::memory_order_relaxed);
}

void dvd_memory_set_thread_card(int64_t card) {
  thread_card = card;
}

// ---- random numbers ----

char* dvd_generator_new(uint64_t seed, at::Generator** out) {
  return guarded([&] { *out = new at::Generator(at::detail::createCPUGenerator(seed)); });
}

void dvd_generator_free(at::Generator* generator) {
  delete generator;
}

char* dvd_uniform(at::Tensor* tensor, double from, double to, at::Generator* generator) {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    tensor->uniform_(from, to, *generator);
  });
}

char* dvd_normal(at::Tensor* tensor, double mean, double deviation, at::Generator* generator) {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    tensor->normal_(mean, deviation, *generator);
  });
}

// ---- stores ----

struct SharedStore {
  c10::intrusive_ptr<c10d::Store> store;
};

char* dvd_store_file(const char* path, int64_t world_size, int64_t timeout_ms, SharedStore** out) {
  return guarded([&] {
    auto store = c10::make_intrusive<c10d::FileStore>(path, static_cast<int>(world_size));
    store->setTimeout(std::chrono::milliseconds(timeout_ms));
    *out = new SharedStore{std::move(store)};
  });
}

// Does not wait for the other ranks: they meet at the keys they wait for.
char* dvd_store_tcp(const char* host, uint16_t port, int64_t world_size, bool serve, int64_t timeout_ms,
                    SharedStore** out, uint16_t* bound_port) {
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = serve;
    options.numWorkers = static_cast<size_t>(world_size);
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    *bound_port = store->getPort();
    *out = new SharedStore{std::move(store)};
  });
}

void dvd_store_set_timeout(SharedStore* store, int64_t timeout_ms) {
  store->store->setTimeout(std::chrono::milliseconds(timeout_ms));
}

void dvd_store_free(SharedStore* store) {
  delete store;
}

char* dvd_store_set(SharedStore* store, const char* key, const uint8_t* value, size_t length) {
  return guarded([&] { store->store->set(key, std::vector<uint8_t>(value, value + length)); });
}

char* dvd_store_get(SharedStore* store, const char* key, uint8_t** value, size_t* length) {
  return guarded([&] {
    const std::vector<uint8_t> bytes = store->store->get(key);
    auto* copy = static_cast<uint8_t*>(std::malloc(bytes.empty() ? 1 : bytes.size()));
    if (copy == nullptr) {
      throw std::bad_alloc();
    }
    if (!bytes.empty()) {
      std::memcpy(copy, bytes.data(), bytes.size());
    }
    *value = copy;
    *length = bytes.size();
  });
}

char* dvd_store_add(SharedStore* store, const char* key, int64_t amount, int64_t* sum) {
  return guarded([&] { *sum = store->store->add(key, amount); });
}

// ---- number formats ----

struct SavedAutocast {
  bool cuda;
  bool enabled;
  bool cache;
  int8_t kind;
};

// What torch.autocast does on entry, for the calling thread.
char* dvd_autocast_enter(bool cuda, bool half, SavedAutocast* saved) {
  return guarded([&] {
    const auto device = cuda ? at::kCUDA : at::kCPU;
    *saved = {cuda, at::autocast::is_autocast_enabled(device), at::autocast::is_autocast_cache_enabled(),
              static_cast<int8_t>(at::autocast::get_autocast_dtype(device))};
    at::autocast::set_autocast_dtype(device, half ? at::kHalf : at::kBFloat16);
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::increment_nesting();
  });
}

void dvd_autocast_exit(SavedAutocast saved) {
  // Nothing to report to: setting thread-local flags does not fail.
  std::free(guarded([&] {
    const auto device = saved.cuda ? at::kCUDA : at::kCPU;
    if (at::autocast::decrement_nesting() == 0) {
      at::autocast::clear_cache();
    }
    at::autocast::set_autocast_enabled(device, saved.enabled);
    at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(saved.kind));
    at::autocast::set_autocast_cache_enabled(saved.cache);
  }));
}

// Multiplies gradients in place; all must be on one device.
char* dvd_unscale(at::Tensor* const* gradients, size_t count, double factor, bool* finite) {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    *finite = true;
    if (count == 0) {
      return;
    }
    const auto tensors = list(gradients, count);
    const auto options = tensors[0].options().dtype(at::kFloat);
    auto found = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, at::full({}, factor, options));
    *finite = found.item<float>() == 0.0f;
  });
}

void dvd_set_tf32(bool allow) {
  std::free(guarded([&] {
    at::globalContext().setAllowTF32CuBLAS(allow);
    at::globalContext().setAllowTF32CuDNN(allow);
  }));
}

void dvd_tf32(bool* allowed) {
  std::free(guarded([&] {
    allowed[0] = at::globalContext().allowTF32CuBLAS();
    allowed[1] = at::globalContext().allowTF32CuDNN();
  }));
}

// ---- the library itself ----

// How the loaded libtorch was configured, and the file that it was loaded from (null if unknown).
char* dvd_library(char** config, char** path) {
  return guarded([&] {
    *config = strdup(at::show_config().c_str());
    Dl_info info;
    const bool found = dladdr(reinterpret_cast<const void*>(&at::show_config), &info) != 0;
    *path = found && info.dli_fname != nullptr ? strdup(info.dli_fname) : nullptr;
  });
}

} // extern "C"
