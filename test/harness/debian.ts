import { spawn } from "node:child_process";
import { existsSync, rmSync, writeFileSync } from "node:fs";

/** Debian's packages that the tests use, each with a file that tells whether it is installed. */
export interface DebianPackage {
  name: string;
  installed(): boolean;
}

/**
 * Installs what is missing, if we may. Says nothing about success: the servers look for their programs
 * themselves, so that each can name the reason why it is not there. What is told here is no part of what a bench prints (--json).
 */
export async function installMissing(packages: DebianPackage[]): Promise<void> {
  const names = packages.filter((each) => !each.installed()).map((each) => each.name);
  if (names.length === 0 || process.getuid?.() !== 0 || !existsSync("/usr/bin/apt-get")) return;
  console.error(`Installing ${names.join(", ")} for the tests`);
  const lift = forbidServices();
  try {
    const wait = ["-o", "DPkg::Lock::Timeout=300"];
    await run("apt-get", [...wait, "update"]);
    await run("apt-get", [...wait, "install", "-y", "--no-install-recommends", ...names]);
  } catch (error) {
    console.error(String(error));
  } finally {
    lift();
  }
}

const POLICY = "/usr/sbin/policy-rc.d";

/** The packages would start their services, on the ports a developer's own servers may want. */
function forbidServices(): () => void {
  if (existsSync(POLICY)) return () => {};
  writeFileSync(POLICY, "#!/bin/sh\nexit 101\n", { mode: 0o755 });
  return () => rmSync(POLICY, { force: true });
}

function run(file: string, args: string[]): Promise<void> {
  return new Promise((resolve, reject) => {
    const child = spawn(file, args, {
      env: { ...process.env, DEBIAN_FRONTEND: "noninteractive" },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let output = "";
    child.stdout.on("data", (chunk) => (output += String(chunk)));
    child.stderr.on("data", (chunk) => (output += String(chunk)));
    child.once("error", reject);
    child.once("close", (code) => {
      if (code === 0) resolve();
      else
        reject(new Error(`${file} ${args.join(" ")} failed:\n${output.split("\n").slice(-20).join("\n")}`));
    });
  });
}
