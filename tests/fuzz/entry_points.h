// What the fuzzers call: any bytes may come in; only the library's own typed errors may come out.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace maniple::fuzz {

/// As an acceptor and as a dialler would read them, in one piece and byte by byte.
void handshake(std::string_view bytes);
/// As the records of a connection, in one piece and byte by byte: nothing but what was sealed comes out.
void records(std::string_view bytes);
/// As a store's server would read them from two clients, and as a client would read a server's replies.
void store(std::string_view bytes);
/// As a collective would receive them, with three frames posted.
void frame(std::string_view bytes);
/// As the stream of point-to-point messages would read them, in one piece and byte by byte.
void message(std::string_view bytes);
/// As an error, and as a failure report, of another process.
void error(std::string_view bytes);
/// As a message on a connection of the failure detector.
void control(std::string_view bytes);
/// As the list of ranks that the store holds.
void peer_table(std::string_view bytes);
/// As a file of a checkpoint.
void safetensors(std::string_view bytes);
/// As the pickle in a file of torch.save.
void pickle(std::string_view bytes);
/// As a file of torch.save.
void torch_file(std::string_view bytes);
/// As the index of weights in several files.
void weights_index(std::string_view bytes);
/// As the index of a sharded checkpoint, and as a manifest.
void checkpoint_index(std::string_view bytes);
/// As a file of images or labels, plain and inside gzip.
void idx(std::string_view bytes);
/// As a tar of samples, read and passed over.
void tar(std::string_view bytes);
/// As a CSV file, plain and inside gzip.
void csv(std::string_view bytes);
/// As the values of the launcher's options, and as a hostfile.
void launch_options(std::string_view bytes);
/// As a message of another launcher of the job.
void agent_message(std::string_view bytes);

/// Well-formed inputs to begin with.
std::vector<std::string> handshake_seeds();
std::vector<std::string> records_seeds();
std::vector<std::string> store_seeds();
std::vector<std::string> frame_seeds();
std::vector<std::string> message_seeds();
std::vector<std::string> error_seeds();
std::vector<std::string> control_seeds();
std::vector<std::string> peer_table_seeds();
std::vector<std::string> safetensors_seeds();
std::vector<std::string> pickle_seeds();
std::vector<std::string> torch_file_seeds();
std::vector<std::string> weights_index_seeds();
std::vector<std::string> checkpoint_index_seeds();
std::vector<std::string> idx_seeds();
std::vector<std::string> tar_seeds();
std::vector<std::string> csv_seeds();
std::vector<std::string> launch_options_seeds();
std::vector<std::string> agent_message_seeds();

}  // namespace maniple::fuzz
