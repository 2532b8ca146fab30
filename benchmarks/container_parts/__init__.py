"""Build an image without Docker: `dockerfile` reads a Dockerfile, `image_builder` carries out its
steps in a chroot on a Debian made by debootstrap, and `chroot_container` runs commands in the
result as a container would. `pip_settings` passes this machine's pip settings to the build.
"""
