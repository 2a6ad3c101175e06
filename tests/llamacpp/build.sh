#!/bin/sh
# Builds the real llama-server for CPU into a folder: `build.sh FOLDER`. Run again, it does only what is missing.
# The source is what llama-cpp-python vendors in its sdist: a package index is reachable where GitHub may not be, and the
# hash below pins the llama.cpp commit (0c1e57098 of 2026-10-01), so that recorded logs and numbers stay comparable.
set -eu

VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
JOBS=${JOBS:-2}

target=${1:?usage: build.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
archive=$target/llama_cpp_python-$VERSION.tar.gz
source=$target/llama_cpp_python-$VERSION/vendor/llama.cpp
build=$target/build
server=$build/bin/llama-server

if [ -e "$build/.built-$VERSION" ] && [ -x "$server" ]; then
  echo "$server"
  exit 0
fi

for program in cmake curl tar c++; do
  command -v "$program" >/dev/null || { echo "build.sh: $program is missing" >&2; exit 1; }
done

verified() { [ -e "$archive" ] && echo "$SHA256  $archive" | sha256sum --check --status; }

mkdir -p "$target"
if ! verified; then
  url=$(curl -sSf https://pypi.org/simple/llama-cpp-python/ |
    sed -n "s/.*href=\"\([^\"#]*llama_cpp_python-$VERSION\.tar\.gz\).*/\1/p" | head -n 1)
  curl -sSfL -o "$archive.part" "$url"
  mv "$archive.part" "$archive"
  verified || { echo "build.sh: $archive is not the file of $VERSION" >&2; exit 1; }
fi
[ -e "$source/CMakeLists.txt" ] || tar xzf "$archive" -C "$target"

# No web page, no TLS, no tests: the server alone. Static, so that the binary is one file to name in a launch.
generator=
command -v ninja >/dev/null && generator="-G Ninja"
# shellcheck disable=SC2086  # the generator is two words or none
cmake -S "$source" -B "$build" $generator -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
  -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DCMAKE_PROJECT_INCLUDE="$here/unity.cmake" >&2
nice -n 15 cmake --build "$build" --target llama-server -j "$JOBS" >&2
touch "$build/.built-$VERSION"
echo "$server"
