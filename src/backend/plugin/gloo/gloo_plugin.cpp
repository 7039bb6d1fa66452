// Gloo as an engine: a context for each group, connected over the job's own store.
#include "backend/plugin/gloo/broken_pipe.h"
#include "backend/plugin/gloo/gloo_collectives.h"
#include "backend/plugin/gloo/gloo_context.h"

#include <gloo/common/error.h>

namespace maniple::gloo_engine {
namespace {

class GlooPlugin final : public Plugin {
 public:
  explicit GlooPlugin(const PluginContext& context)
      : context_(context), gloo_(std::make_shared<LimitedContext>(context_)) {
    const NoBrokenPipe guard;  // Gloo's thread starts here
    gloo_->connect(context_);
  }

  std::string_view name() const noexcept override { return "gloo/tcp"; }
  bool can(const Operation& operation) const noexcept override { return has_collective(operation); }

  bool run(const Operation& operation, Deadline deadline) override {
    const NoBrokenPipe guard;
    gloo_->set_deadline(deadline);
    try {
      run_collective(gloo_, operation, context_.pair_reduce, ++tag_);
      return true;
    } catch (const GivenUp&) {
      return false;
    } catch (const gloo::IoException& error) {
      throw PeerLost(std::string("a rank is lost: gloo says ") + error.what(), -1);
    }
  }

  void interrupt() noexcept override { gloo_->interrupt(); }

  // Gloo can only be waited for, not asked; and its one transport is TCP. So is ours.
  std::unique_ptr<ByteSink> sink(int, Lane) override { return nullptr; }
  std::unique_ptr<ByteSource> source(int, Lane) override { return nullptr; }

 private:
  PluginContext context_;
  std::shared_ptr<LimitedContext> gloo_;
  std::uint32_t tag_ = 0;
};

std::unique_ptr<Plugin> make(const PluginContext& context) { return std::make_unique<GlooPlugin>(context); }

constexpr PluginEntry kPlugin = {kPluginAbi, sizeof(Operation), "Gloo, over TCP", make};

}  // namespace
}  // namespace maniple::gloo_engine

extern "C" const maniple::PluginEntry* maniple_plugin_entry() { return &maniple::gloo_engine::kPlugin; }
