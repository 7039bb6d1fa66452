# Compile settings for all targets, and output folders of programs.
include(GNUInstallDirs)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# Shared libraries export marked names only: see maniple/export.h.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG -g1")

# The program `maniple` goes into build/bin; examples, tests and peer programs go into a folder of it.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
macro(maniple_programs_in folder)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin/${folder})
endmacro()

find_program(MANIPLE_CCACHE ccache)
mark_as_advanced(MANIPLE_CCACHE)
if(MANIPLE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # ccache needs these settings for precompiled headers.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${MANIPLE_CCACHE})
endif()

add_library(maniple_warnings INTERFACE)
target_compile_options(maniple_warnings INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wcast-qual -Wpedantic
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>  # checks the annotations of comm/base/mutex.h
  $<$<BOOL:${MANIPLE_WERROR}>:-Werror>)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  # GCC 12 to 14 report false warnings for concatenated, assigned or moved std::string (GCC bugs 105651, 105329) and for
  # growing std::vector<bool>. Which ones depends on the processor.
  target_compile_options(maniple_warnings INTERFACE -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow
    -Wno-stringop-overread)
endif()

if(MANIPLE_SANITIZE)
  # With sanitizers GCC 12 reports members of std::regex as uninitialised. With the thread sanitizer GCC warns of every
  # fence, whose effect it does not see (Clang does not see it either).
  target_compile_options(maniple_warnings INTERFACE "$<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-tsan>")
  # vptr: this check opens a pipe for each lookup and reports false errors when a test has used up all descriptors.
  add_compile_options(-fsanitize=${MANIPLE_SANITIZE} -fno-sanitize=vptr -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MANIPLE_SANITIZE})
endif()

# Fuzz targets add -fsanitize=fuzzer themselves; the library needs only edge counters. Tests disable the counters with
# MANIPLE_UNCOUNTED.
set(MANIPLE_UNCOUNTED "")
if(MANIPLE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "MANIPLE_FUZZ needs Clang (libFuzzer); this is ${CMAKE_CXX_COMPILER_ID}. "
                        "Use: cmake --preset asan-ubsan")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
  set(MANIPLE_UNCOUNTED -fno-sanitize-coverage=edge,indirect-calls,inline-8bit-counters,pc-table,stack-depth,trace-cmp)
endif()

# Compiles the files of one folder together, which takes a third of the time. During work on the library,
# -DMANIPLE_UNITY=OFF recompiles less after a change.
option(MANIPLE_UNITY "Compile sources in groups: faster full builds, slower incremental builds" ON)

# maniple_compile_in_groups(TARGET): call it after all sources were added to TARGET. Names in the unnamed namespaces of
# one folder must differ.
function(maniple_compile_in_groups target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${MANIPLE_UNITY} UNITY_BUILD_MODE GROUP)
  if(MANIPLE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC treats the grouped files as headers.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  get_target_property(sources ${target} SOURCES)
  get_target_property(home ${target} SOURCE_DIR)
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} ABSOLUTE BASE_DIR ${home})
    get_filename_component(folder ${folder} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${folder})
  endforeach()
endfunction()
