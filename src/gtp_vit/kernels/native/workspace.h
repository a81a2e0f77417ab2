// Scratch memory that lives for one task.
#pragma once
#include <cstddef>
#include <cstdlib>

class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  ~Workspace() { std::free(memory_); }

  // Room for `count` floats, aligned to a cache line; what was there is lost. nullptr if there is no memory.
  float* floats(size_t count) {
    if (count > capacity_ || !memory_) {
      std::free(memory_);
      const size_t bytes = (count * sizeof(float) + 64) / 64 * 64;
      memory_ = std::aligned_alloc(64, bytes);
      capacity_ = memory_ ? count : 0;
    }
    return (float*)memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t capacity_ = 0;
};
