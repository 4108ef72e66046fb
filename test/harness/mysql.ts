import { execFile } from "node:child_process";
import { randomBytes } from "node:crypto";
import { existsSync } from "node:fs";
import { chmod, lstat, mkdtemp, readdir, rename, rm } from "node:fs/promises";
import { basename, join } from "node:path";
import { promisify } from "node:util";
import mysql from "mysql2/promise";
import { type Command, serverTempDir, startServer } from "../../packages/cli/src/server-process.ts";
import type { DebianPackage } from "./debian.ts";
import type { RestartableServer } from "./started-server.ts";

const run = promisify(execFile);

/** Debian has MySQL in unstable only: its packages are fetched by this, and unpacked where nothing else sees them. */
const FETCHER = "/usr/sbin/debootstrap";
const SUITE = "sid";
const PACKAGES = ["mysql-server-core", "odyssey"];
const MIRROR = "http://deb.debian.org/debian";

export const debootstrapPackage: DebianPackage = {
  name: "debootstrap",
  installed: () => existsSync(FETCHER),
};

/**
 * A server by address (HOLDFAST_MYSQL_URL), this machine's own mysqld, or Debian's in a folder of its own. With further settings, as
 * arguments of the server.
 */
export async function startMysql(settings: readonly string[] = []): Promise<RestartableServer> {
  const url = process.env["HOLDFAST_MYSQL_URL"];
  if (url)
    return {
      url,
      stop: async () => {},
      restart: () =>
        Promise.reject(new Error("HOLDFAST_MYSQL_URL names a server that is not ours to restart")),
    };
  const command = commandOf(await mysqlProgram());
  const password = randomBytes(18).toString("base64url");
  const urlOf = (port: number): string => `mysql://holdfast:${password}@127.0.0.1:${port}/mysql`;
  const server = await startServer({
    name: "mysql",
    stopSignal: "TERM",
    timeout: 120_000,
    async prepare(place) {
      await place.run(
        command([
          "--initialize-insecure",
          `--datadir=${join(place.dir, "data")}`,
          // In a shared one, a server that starts meanwhile deletes what it takes for leftovers.
          `--tmpdir=${place.dir}`,
        ]),
      );
      // Read before the port opens, hence nobody meets the account that has no password.
      await place.write(
        "init.sql",
        [
          `CREATE USER IF NOT EXISTS 'holdfast'@'%' IDENTIFIED BY '${password}';`,
          "GRANT ALL PRIVILEGES ON *.* TO 'holdfast'@'%' WITH GRANT OPTION;",
          "DROP USER IF EXISTS 'root'@'localhost';",
        ].join("\n"),
      );
    },
    command: ({ dir }, port) =>
      command([
        `--datadir=${join(dir, "data")}`,
        `--tmpdir=${dir}`,
        `--port=${port}`,
        "--bind-address=127.0.0.1",
        "--mysqlx=OFF",
        "--secure-file-priv=NULL",
        // Relative to the data directory: a path to a socket must not be longer than some hundred bytes.
        "--socket=mysql.sock",
        `--pid-file=${join(dir, "mysqld.pid")}`,
        `--init-file=${join(dir, "init.sql")}`,
        "--skip-name-resolve",
        "--max-connections=300",
        // Tests make and drop hundreds of databases; none of them has to outlive the machine's power.
        "--skip-log-bin",
        "--innodb-flush-log-at-trx-commit=0",
        // Some disks take 20 ms for it, and a table that is made asks for it a dozen times.
        "--innodb-flush-method=nosync",
        "--innodb-doublewrite=OFF",
        "--innodb-buffer-pool-size=128M",
        "--character-set-server=utf8mb4",
        ...settings,
      ]),
    async ready(port) {
      const connection = await mysql.createConnection(urlOf(port));
      await connection.end();
    },
  });
  return { url: urlOf(server.port), stop: server.stop, restart: server.restart };
}

interface Program extends Command {
  settings: string[];
  /** Where its plugins are, if that is known. */
  plugins?: string;
}

/** This machine's own mysqld, or Debian's in a folder of its own. */
export async function mysqlProgram(): Promise<Program> {
  return (await localProgram()) ?? (await fetchedProgram());
}

/** How it is run, with these arguments and no settings of this machine's. */
export function commandOf(program: Program): (args: string[]) => Command {
  return (args) => ({
    file: program.file,
    args: [...program.args, "--no-defaults", ...program.settings, ...args],
  });
}

/** On many systems `mysqld` is another name of MariaDB's. */
async function localProgram(): Promise<Program | undefined> {
  const folders = [...(process.env["PATH"] ?? "").split(":"), "/usr/sbin", "/usr/local/mysql/bin"];
  for (const file of new Set(folders.map((folder) => join(folder, "mysqld")))) {
    if (!existsSync(file)) continue;
    const { stdout } = await run(file, ["--no-defaults", "--version"]).catch(() => ({ stdout: "" }));
    const [, major, minor] = /Ver (\d+)\.(\d+)/.exec(stdout) ?? [];
    if (!/mariadb/i.test(stdout) && Number(major) + Number(minor) / 100 >= 8.04)
      return { file, args: [], settings: [] };
  }
  return undefined;
}

/**
 * What was fetched is run by the loader and with the libraries that it was built with: this machine's may be older, or missing.
 * The loader is beside the libraries on every architecture; `/lib` has a link to it on arm64, `/lib64` on x64.
 */
export async function fetchedCommand(usr: string, program: string, ...folders: string[]): Promise<Command> {
  const lib = join(usr, "lib");
  const libraries = (await readdir(lib)).filter((name) => name.endsWith("-linux-gnu"));
  const beside = await Promise.all(
    libraries.map(async (name) => (await readdir(join(lib, name))).map((file) => join(lib, name, file))),
  );
  const loader = beside.flat().find((file) => basename(file).startsWith("ld-linux"));
  if (loader === undefined)
    throw new Error(`there is no loader (ld-linux…) in ${lib} to run ${program} with`);
  const path = [...libraries, ...folders].map((name) => join(lib, name)).join(":");
  return { file: loader, args: ["--library-path", path, join(usr, program)] };
}

async function fetchedProgram(): Promise<Program> {
  const usr = join(await fetched(), "usr");
  const plugins = join(usr, "lib/mysql/plugin");
  return {
    ...(await fetchedCommand(usr, "sbin/mysqld", "mysql/private")),
    plugins,
    settings: [
      `--basedir=${usr}`,
      `--lc-messages-dir=${join(usr, "share/mysql")}`,
      `--character-sets-dir=${join(usr, "share/mysql/charsets")}`,
      `--plugin-dir=${plugins}`,
    ],
  };
}

/**
 * A folder that stays from run to run. It is filled under a name of its own and renamed then, so that two runs that
 * begin at once cannot meet half of it; whoever comes second throws its own away.
 */
export async function fetched(): Promise<string> {
  const owner = process.getuid?.() ?? 0;
  const target = join(serverTempDir(), `holdfast-unstable-${SUITE}-${process.arch}-${owner}`);
  if (await isOurs(target, owner)) return target;
  if (process.platform !== "linux" || !existsSync(FETCHER))
    throw new Error(
      `there is no ${FETCHER} to fetch MySQL (unless this machine has it, or HOLDFAST_MYSQL_URL names it) and Odyssey with`,
    );
  console.error(
    `Fetching MySQL and Odyssey for the tests (about a minute and 400 MB), to be kept in ${target}`,
  );
  const draft = await mkdtemp(`${target}-`);
  try {
    const packages = join(draft, "packages");
    const args = ["--variant=minbase", `--include=${PACKAGES.join(",")}`, "--download-only", SUITE, packages];
    await run(FETCHER, [...args, await mirror()], { maxBuffer: 2 ** 26 });
    const archives = join(packages, "var/cache/apt/archives");
    const root = join(draft, "root");
    // The servers and libraries: the rest is what a whole system would need.
    for (const name of await readdir(archives))
      if (/^(lib|mysql|odyssey).*\.deb$/.test(name))
        await run("dpkg-deb", ["-x", join(archives, name), root]);
    // The server's user is another one, and reads it.
    await chmod(root, 0o755);
    await rename(root, target).catch(async (error: unknown) => {
      if (!(await isOurs(target, owner))) throw error;
    });
    return target;
  } catch (error) {
    throw new Error(`MySQL and Odyssey could not be fetched: ${lastLines(error)}`, { cause: error });
  } finally {
    await rm(draft, { recursive: true, force: true });
  }
}

/** Others may write to the folder for temporary things: what is not ours is not run. */
async function isOurs(folder: string, owner: number): Promise<boolean> {
  const found = await lstat(folder).catch(() => undefined);
  if (!found) return false;
  if (!found.isDirectory() || found.uid !== owner || (found.mode & 0o022) !== 0)
    throw new Error(`${folder} is not a folder that only this user can write to`);
  return true;
}

/** The one that this machine's own packages come from, or the one that everybody can reach. */
async function mirror(): Promise<string> {
  const { stdout } = await run("apt-get", ["indextargets", "--format", "$(REPO_URI)"]).catch(() => ({
    stdout: "",
  }));
  return stdout.split("\n").find((line) => /^https?:/.test(line) && !line.includes("security")) ?? MIRROR;
}

function lastLines(error: unknown): string {
  const { stdout = "", stderr = "" } = error as { stdout?: string; stderr?: string };
  const lines = `${stdout}\n${stderr}`.trim().split("\n").slice(-5).join("\n");
  return lines || String(error);
}
