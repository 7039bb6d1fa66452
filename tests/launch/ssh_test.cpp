// --hosts over a real ssh: a server of the test's own on loopback, with keys and settings in a temporary folder.
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>

#include <fmt/format.h>

#include "harness/start_process.h"
#include "harness/temporary_directory.h"
#include "launch/launched.h"

namespace maniple::launched {
namespace {

class SshServer {
 public:
  SshServer() {
    const std::string path = folder_.path();
    port_ = harness::free_loopback_port();
    made_ =
        std::system(
            fmt::format(
                "ssh-keygen -q -t ed25519 -N '' -f {0}/host_key && ssh-keygen -q -t ed25519 -N '' -f {0}/user_key && "
                "cp {0}/user_key.pub {0}/authorized_keys && mkdir -p /run/sshd",
                path)
                .c_str()) == 0;
    std::ofstream(path + "/sshd_config") << "ListenAddress 127.0.0.1:" << port_ << "\nListenAddress 127.0.0.2:" << port_
                                         << "\nListenAddress 127.0.0.3:" << port_ << "\nHostKey " << path
                                         << "/host_key\nAuthorizedKeysFile " << path
                                         << "/authorized_keys\nPidFile none\nUsePAM no\nStrictModes "
                                            "no\nPermitRootLogin yes\nPasswordAuthentication no\n";
    std::ofstream(path + "/ssh_config") << "Host *\nPort " << port_ << "\nIdentityFile " << path
                                        << "/user_key\nIdentitiesOnly yes\nBatchMode yes\n"
                                        << "StrictHostKeyChecking no\nUserKnownHostsFile " << path
                                        << "/known_hosts\nLogLevel ERROR\n";
    if (made_)
      server_ = std::make_unique<Launched>(std::vector<std::string>{"-D", "-e", "-f", path + "/sshd_config"},
                                           Setting{.program = "/usr/sbin/sshd"});
  }
  ~SshServer() {
    if (server_) server_->signal(SIGTERM);
  }
  static std::string why_not() {
    if (::geteuid() != 0) return "needs root";
    return ::access("/usr/sbin/sshd", X_OK) == 0 && ::access("/usr/bin/ssh", X_OK) == 0
               ? ""
               : "openssh-server is not installed";
  }
  bool ready() { return made_ && server_->wait_for("Server listening on 127.0.0.1", 30); }
  std::string shell() const { return "ssh -F " + folder_.path() + "/ssh_config"; }

 private:
  harness::TemporaryDirectory folder_;
  int port_ = 0;
  bool made_ = false;
  std::unique_ptr<Launched> server_;
};

TEST(Ssh, HostsOverARealServer) {
  if (const std::string why = SshServer::why_not(); !why.empty()) GTEST_SKIP() << why;
  SshServer server;
  ASSERT_TRUE(server.ready());
  const Result joined =
      maniple({"run", "--hosts", "127.0.0.2:2,127.0.0.3:1", "--rsh", server.shell(), "--env", "WORD=it's \"one\"", "sh",
               "-c", "echo \"$NODE_RANK $WORD\"; exec \"$0\" join", worker_program()});
  EXPECT_EQ(joined.code, 0) << joined.err;
  EXPECT_NE(joined.out.find("[rank 2] 1 it's \"one\"\n"), std::string::npos) << joined.out;
  EXPECT_NE(joined.out.find("[rank 2] sum 3 of 3"), std::string::npos) << joined.out;

  const Result failed = maniple({"run", "--hosts", "localhost:1,127.0.0.2:1", "--rsh", server.shell(), "sh", "-c",
                                 "[ $RANK = 1 ] && exit 6; sleep 1000"});
  EXPECT_EQ(failed.code, 6) << failed.err;
  EXPECT_NE(failed.err.find("rank 1 of 2 failed first, on host 127.0.0.2"), std::string::npos) << failed.err;

  // Ctrl-C reaches the workers there; a launcher that is killed leaves nothing.
  const std::string mark = new_mark();
  const std::vector<std::string> job = {"run",
                                        "--hosts",
                                        "127.0.0.2:1,127.0.0.3:1",
                                        "--rsh",
                                        server.shell(),
                                        "--env",
                                        mark,
                                        "sh",
                                        "-c",
                                        "trap 'echo saved; exit 0' INT; echo up; while :; do sleep 0.05; done"};
  Launched interrupted(job);
  ASSERT_TRUE(interrupted.wait_for("] up", 60, 2)) << interrupted.err();
  interrupted.signal(SIGINT);
  EXPECT_EQ(interrupted.wait(), 130) << interrupted.err();
  EXPECT_EQ(interrupted.count("saved"), 2) << interrupted.out();
  Launched killed(job);
  ASSERT_TRUE(killed.wait_for("] up", 60, 2)) << killed.err();
  killed.signal(SIGKILL);
  EXPECT_EQ(killed.wait(), 137);
  EXPECT_TRUE(becomes_true([&] { return processes_with(mark).empty(); }));

  const Result nobody = maniple({"run", "--hosts", "127.0.0.4:1", "--rsh", server.shell(), "true"});
  EXPECT_EQ(nobody.code, 2) << nobody.err;
  EXPECT_NE(nobody.err.find("Connection refused"), std::string::npos) << nobody.err;
  EXPECT_NE(nobody.err.find("host 127.0.0.4: its agent could not be started"), std::string::npos) << nobody.err;
}

}  // namespace
}  // namespace maniple::launched
