// Looks a pair up in a snapshot from C++: docs/snapshot-format.md in a page, with Arrow as the only library.
//
//   lookup SNAPSHOT_FOLDER USER_ID ITEM_ID AT_MICROS
//
// prints the age in seconds and the vector of the pair's own embedding, or "none". Built against the Arrow that pyarrow
// brings (tests/udf/test_snapshot_cpp.py has the command) or any other Arrow C++.
#include <arrow/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>

using Batch = std::shared_ptr<arrow::RecordBatch>;

// xxHash64 of eight bytes.
uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }
uint64_t xxh64(int64_t id, uint64_t seed) {
  const uint64_t p1 = 0x9E3779B185EBCA87, p2 = 0xC2B2AE3D27D4EB4F, p3 = 0x165667B19E3779F9;
  const uint64_t p4 = 0x85EBCA77C2B2AE63, p5 = 0x27D4EB2F165667C5;
  uint64_t h = seed + p5 + 8;
  h ^= rotate(static_cast<uint64_t>(id) * p2, 31) * p1;
  h = rotate(h, 27) * p1 + p4;
  h = (h ^ (h >> 33)) * p2;
  h = (h ^ (h >> 29)) * p3;
  return h ^ (h >> 32);
}

// The one record batch of a file, mapped: nothing is read but what is touched.
arrow::Result<Batch> open(const std::string& path) {
  ARROW_ASSIGN_OR_RAISE(auto file, arrow::io::MemoryMappedFile::Open(path, arrow::io::FileMode::READ));
  ARROW_ASSIGN_OR_RAISE(auto reader, arrow::ipc::RecordBatchFileReader::Open(file));
  return reader->ReadRecordBatch(0);
}

template <typename Array>
const Array& column(const Batch& batch, const char* name) {
  return static_cast<const Array&>(*batch->GetColumnByName(name));
}

// The whole number after "key": in the manifest; a service would use a JSON library.
int64_t number(const std::string& json, const std::string& key) {
  const auto at = json.find("\"" + key + "\":");
  if (at == std::string::npos) throw std::runtime_error("manifest.json has no " + key);
  return std::stoll(json.substr(at + key.size() + 3));
}

// Another major version may have other columns, or mean something else by them; a later minor one only adds keys.
void check_version(const std::string& json) {
  const std::string key = "\"format_version\":";
  const auto at = json.find(key), from = json.find('"', at + key.size()) + 1;
  if (at == std::string::npos || from == 0) throw std::runtime_error("manifest.json has no format_version");
  const std::string version = json.substr(from, json.find('"', from) - from);
  if (version.rfind("1.", 0) == 0) return;
  throw std::runtime_error("manifest.json has format version " + version + "; this reader knows 1.x");
}

float half(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
  return bits >> 15 ? -size : size;
}

arrow::Status lookup(const std::string& folder, int64_t user, int64_t item, int64_t at) {
  std::stringstream text;
  text << std::ifstream(folder + "/manifest.json").rdbuf();
  const std::string manifest = text.str();
  check_version(manifest);
  const uint64_t shards = number(manifest, "shards"), of_user = xxh64(user, 42), hash = xxh64(item, of_user);
  char shard[32];
  std::snprintf(shard, sizeof shard, "/shard-%05d-of-%05d/", static_cast<int>((of_user & 0xFFFFFFFF) % shards),
                static_cast<int>(shards));
  ARROW_ASSIGN_OR_RAISE(auto pairs, open(folder + shard + "pairs.arrow"));
  ARROW_ASSIGN_OR_RAISE(auto buckets, open(folder + shard + "pairs.buckets.arrow"));
  const auto& offset = column<arrow::UInt32Array>(buckets, "offset");
  const uint64_t bucket = ((hash >> 32) * (buckets->num_rows() - 1)) >> 32;
  for (uint32_t row = offset.Value(bucket); row < offset.Value(bucket + 1); ++row) {
    if (column<arrow::Int64Array>(pairs, "user_id").Value(row) != user) continue;
    if (column<arrow::Int64Array>(pairs, "item_id").Value(row) != item) continue;
    const int64_t age = at - column<arrow::Int64Array>(pairs, "computed_at").Value(row);
    if (age < 0 || age >= number(manifest, "ttl_micros")) break;
    const auto& packed = column<arrow::FixedSizeBinaryArray>(pairs, "embedding");
    const bool halves = manifest.find("\"codec\": \"float16\"") != std::string::npos;
    const uint8_t* bytes = packed.GetValue(row);
    std::cout << age / 1000000;
    float scale;
    std::memcpy(&scale, bytes, 4);
    for (int64_t d = 0; d < number(manifest, "dim"); ++d) {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * d, 2);
      std::cout << ' ' << (halves ? half(bits) : scale * static_cast<int8_t>(bytes[4 + d]));
    }
    std::cout << '\n';
    return arrow::Status::OK();
  }
  std::cout << "none\n";
  return arrow::Status::OK();
}

int main(int count, char** words) try {
  if (count != 5) throw std::runtime_error("usage: lookup SNAPSHOT_FOLDER USER_ID ITEM_ID AT_MICROS");
  const auto status = lookup(words[1], std::stoll(words[2]), std::stoll(words[3]), std::stoll(words[4]));
  if (!status.ok()) throw std::runtime_error(status.ToString());
} catch (const std::exception& error) {
  std::cerr << "lookup: " << error.what() << '\n';
  return 2;
}
