// Scratch memory, kept from task to task: fresh pages cost as much as the work that is done in them.
#pragma once
#include <cstddef>
#include <cstdlib>

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { release(); }

  // Room for `count` floats, aligned to a cache line; what was there is lost. nullptr if there is no memory.
  float* floats(size_t count) {
#if defined(__SANITIZE_ADDRESS__)
    release();  // every task gets a block of exactly its own size, so that none can hide in another's
#endif
    if (count > capacity_ || !memory_) {
      release();
      memory_ = std::aligned_alloc(64, (count * sizeof(float) + 64) / 64 * 64);
      capacity_ = memory_ ? count : 0;
    }
    return (float*)memory_;
  }

  // Give large blocks back: they would stay for the life of the thread.
  void trim() {
    if (capacity_ > LARGEST_KEPT) release();
  }

 private:
  static constexpr size_t LARGEST_KEPT = 4 << 20;  // floats: 16 MiB

  void release() {
    std::free(memory_);
    memory_ = nullptr;
    capacity_ = 0;
  }

  void* memory_ = nullptr;
  size_t capacity_ = 0;
};
