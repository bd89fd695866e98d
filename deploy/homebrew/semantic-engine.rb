# The formula of a tap. `make release` fills in the words between @ and writes it to dist.
class SemanticEngine < Formula
  desc "Many LLM agents share one local model, and no token is computed twice"
  homepage "@HOME@"
  url "@URL@"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "uv" => :build
  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # The libraries of wheels have no room in their headers for longer names.
  preserve_rpath

  # The locked wheels and no resources: Homebrew builds those, and MLX then needs all of Xcode.
  def install
    environment = libexec/"bin/python"
    system "uv", "venv", "--python", which("python3.13"), libexec
    system "uv", "pip", "install", "--python", environment, "--requirements", "requirements.txt"
    system "uv", "pip", "install", "--python", environment, "--no-deps",
           "--build-constraints", "requirements-build.txt", buildpath
    bin.install_symlink libexec/"bin/semantic"
    generate_completions_from_executable(bin/"semantic", shell_parameter_format: :typer)
  end

  service do
    run [opt_bin/"semantic", "serve"]
    keep_alive successful_exit: false
    log_path var/"log/semantic.log"
    error_log_path var/"log/semantic.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/semantic --version")
    system bin/"semantic", "agents", "ls"
  end
end
