// Detects children of fork(). A child has copies of its parent's objects but not its threads, and the descriptors and
// shared memory behind those objects belong to the parent. Header only, so that plugins, which do not link Maniple, use
// the same guard.
//
//   class Lock {
//     ~Lock() { if (guard_.owned()) unlock(); }
//     ForkGuard guard_;   // remembers the process that created it
//   };
//
// A guard detects children of fork(). vfork(), posix_spawn(), system() and popen() do not run fork handlers and need no
// guard: the child executes another program, and exec closes all of Maniple's descriptors. A raw clone() without
// CLONE_VM is not detected.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include <maniple/export.h>

namespace MANIPLE_API maniple {

namespace detail {

/// 0 in the original process, larger in its children.
inline constinit std::atomic<std::uint32_t> fork_generation{0};

inline std::uint32_t watched_fork_generation() noexcept {
  static const int watched =
      ::pthread_atfork(nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)watched;
  return fork_generation.load(std::memory_order_relaxed);
}

struct Abandoned {
  virtual ~Abandoned() = default;
  Abandoned* next = nullptr;
};
inline constinit std::atomic<Abandoned*> abandoned{nullptr};  // keeps abandoned objects reachable for leak checkers

}  // namespace detail

/// Remembers the process that created it. A copy counts as created by the same process as the original.
class ForkGuard {
 public:
  ForkGuard() noexcept : generation_(detail::watched_fork_generation()) {}
  /// False in children of the creating process. One relaxed load.
  bool owned() const noexcept { return generation_ == detail::fork_generation.load(std::memory_order_relaxed); }
  /// False when created in a child of fork().
  bool is_original() const noexcept { return generation_ == 0; }

 private:
  std::uint32_t generation_;
};

/// For destructors that run in a child: moves `object` to storage that is never destroyed. Destroying it could hang,
/// joining a thread that exists only in the parent or taking a lock that such a thread held.
template <class T>
void abandon(T& object) {
  struct Kept final : detail::Abandoned {
    explicit Kept(T&& given) : it(std::move(given)) {}
    T it;
  };
  auto* kept = new Kept(std::move(object));
  kept->next = detail::abandoned.load(std::memory_order_relaxed);
  while (!detail::abandoned.compare_exchange_weak(kept->next, kept, std::memory_order_acq_rel)) {
  }
}

/// One T per process, created at first use. A child of fork() creates its own, because a thread that exists only in the
/// parent may hold the locks of the copy. Never destroyed, because groups in static objects use it until the process
/// ends.
///
///   constinit ProcessWide<Table> table;
///   const MutexLock lock(table->mutex);
template <class T>
class ProcessWide {
 public:
  constexpr ProcessWide() noexcept = default;
  ProcessWide(const ProcessWide&) = delete;
  ProcessWide& operator=(const ProcessWide&) = delete;

  T& operator*() {
    Node* node = node_.load(std::memory_order_acquire);
    if (node == nullptr || !node->guard.owned()) [[unlikely]]
      node = make(node);
    return node->it;
  }
  T* operator->() { return &**this; }

 private:
  struct Node {
    explicit Node(Node* parents) : before(parents) {}
    ForkGuard guard;
    Node* before;  // keeps the parent's node reachable for leak checkers
    T it{};
  };
  Node* make(Node* known) {
    auto* fresh = new Node(known);
    while (!node_.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) {
      if (known->guard.owned()) {  // another thread was faster
        delete fresh;
        return known;
      }
      fresh->before = known;
    }
    return fresh;
  }
  std::atomic<Node*> node_{nullptr};
};

}  // namespace maniple
