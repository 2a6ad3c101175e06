# llama.cpp's multimodal part is 50 small files, most of the build's time for a server that only writes text here: compile
# them in a few units. The two helpers refuse to be compiled beside internal headers.
set(mtmd_folder ${CMAKE_SOURCE_DIR}/tools/mtmd)
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL
  set_target_properties mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 30)
cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL
  set_source_files_properties ${mtmd_folder}/mtmd-helper.cpp ${mtmd_folder}/mtmd-helper-gen.cpp
  TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
