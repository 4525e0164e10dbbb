/** A running service on a fresh database, which goes with it. */
export interface Userd extends AsyncDisposable {
  /** Its address, as in `http://127.0.0.1:41234`. */
  readonly url: string;
  /** Removes all users, idempotency keys, counts of wrong passwords, faults and requests; a seed is back. */
  reset(): Promise<void>;
  /** Saves users, passwords, idempotency keys and the next id as the state of a name: 1 to 40 of a-z, 0-9 and _. */
  save(name: string): Promise<void>;
  /** Brings a saved state back, any number of times; counts of wrong passwords and faults are forgotten. */
  restore(name: string): Promise<void>;
  /**
   * The requests since the start or the last reset, in the order in which they came, as far as 8 MiB hold them; of this
   * method and path (without a query) alone, if they are given.
   */
  requests(method?: string, path?: string): Promise<Received[]>;
  /**
   * Has the next requests with this method and path fail, once or so many times: "answer-lost", "refused", "503",
   * "slow SECONDS" or "cut BYTES". The end of the service fails where some are left. With "10%" for `times`, each fails
   * with this chance.
   */
  fail(fault: string, method: string, path: string, times?: number | `${number}%`): Promise<void>;
  /** Has choices by chance begin anew, as they were with this seed before. `explain()` tells the seed. */
  chance(seed: number): Promise<void>;
  /** Forgets the faults that are left, and those by chance. */
  failNone(): Promise<void>;
  /** How many requests are yet to fail. */
  faultsLeft(): Promise<number>;
  /** Lets time pass for idempotency keys and for counts of wrong passwords. */
  advance(seconds: number): Promise<void>;
  /** Ends it, as `await using` does. Fails where it did not end well; a second call does nothing. */
  stop(): Promise<void>;
  /** What it has logged so far. */
  log(): string;
  /**
   * For the report of a test that failed: the service, its programs, settings without secrets, request ids, end of the log;
   * after `stop()` the last ten requests, too.
   */
  explain(): string;
}

/** A request that the service has received. Secrets are "***". */
export interface Received {
  method: string;
  /** The path with the query. */
  target: string;
  /** By names in lower case. */
  headers: Record<string, string>;
  /** An object, or the length of a body that is no JSON object. */
  body: any;
}

/** What `node:test` gives a test, as far as it is needed. */
export interface TestContext {
  after(hook: () => Promise<void>): void;
  diagnostic(message: string): void;
  readonly passed?: boolean;
}

export interface Options {
  /** A file of users to begin with, JSON lines or CSV as `userd import` reads them. */
  seed?: string | URL;
  /** The context of a test of `node:test`: the service ends with the test, and explains its failure. */
  test?: TestContext;
  /** The path of the command, instead of the package's. */
  userd?: string;
}

/**
 * Starts a service on a free port. `settings` are variables of `userd --help`, such as `{ SCHEMA: "strict" }`; of the
 * environment only `POSTGRES_BIN` has an effect. The service ends with this process, however that ends.
 */
export function startUserd(settings?: Record<string, string>, options?: Options): Promise<Userd>;

/** The path of the command. */
export function command(): string;
