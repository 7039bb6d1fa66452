# `cmake --install` and what find_package(Maniple) finds. A component is one line at the end of this file.
include(CMakePackageConfigHelpers)
set(MANIPLE_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Maniple)

# maniple_component(NAME [COMPONENTS other ...] [PACKAGES package ...])
# Installs target maniple_NAME as maniple::NAME. Consumers get COMPONENTS with it; PACKAGES are found again on their
# machine, private ones too, because a static library leaves its dependencies to the last link.
function(maniple_component name)
  cmake_parse_arguments(arg "" "" "COMPONENTS;PACKAGES" ${ARGN})
  set_target_properties(maniple_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS maniple_${name} EXPORT maniple_${name}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT maniple_${name} NAMESPACE maniple:: DESTINATION ${MANIPLE_PACKAGE_DIR}
          FILE Maniple-${name}-targets.cmake)
  set(needs "set(Maniple_needs_components ${arg_COMPONENTS})\nset(Maniple_needs_packages ${arg_PACKAGES})\n")
  file(WRITE ${PROJECT_BINARY_DIR}/cmake/Maniple-${name}-needs.cmake "${needs}")
  install(FILES ${PROJECT_BINARY_DIR}/cmake/Maniple-${name}-needs.cmake DESTINATION ${MANIPLE_PACKAGE_DIR})
endfunction()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ManipleConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/ManipleConfig.cmake INSTALL_DESTINATION ${MANIPLE_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/ManipleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/ManipleConfig.cmake ${PROJECT_BINARY_DIR}/cmake/ManipleConfigVersion.cmake
        DESTINATION ${MANIPLE_PACKAGE_DIR})
install(DIRECTORY include/maniple DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md" PATTERN "*.svg" PATTERN site EXCLUDE)
if(TARGET maniple)
  install(TARGETS maniple RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

maniple_component(comm PACKAGES Threads fmt OpenSSL)
maniple_component(launch COMPONENTS comm PACKAGES fmt OpenSSL)
if(MANIPLE_HAVE_TORCH)
  maniple_component(train COMPONENTS comm PACKAGES Torch ZLIB)
endif()
