/** A running service on a database of its own, which goes with it. */
export interface Userd extends AsyncDisposable {
  /** Its address, as in `http://127.0.0.1:41234`. */
  readonly url: string;
  /** The address of its controls. */
  readonly control: string;
  /** The address of its database. */
  readonly databaseUrl: string;
  /** Brings the users of the start back, without idempotency keys, counts of wrong passwords, faults and requests. */
  reset(): Promise<void>;
  /** Saves users, passwords, idempotency keys and the next id as the state of a name: 1 to 40 of a-z, 0-9 and _. */
  save(name: string): Promise<void>;
  /** Brings a saved state back, any number of times; counts of wrong passwords and faults are forgotten. */
  restore(name: string): Promise<void>;
  /**
   * The requests since the start or the last reset, in the order in which they came, as far as 8 MiB hold them; of this
   * method and path or target alone, if they are given.
   */
  requests(method?: string, path?: string): Promise<Received[]>;
  /** Has the next requests with this method and path fail. The end of the service fails if some are left. */
  fail(fault: "answer-lost" | "refused" | "503", method: string, path: string, more?: { times?: number }): Promise<void>;
  fail(fault: "slow", method: string, path: string, more: { seconds: number; times?: number }): Promise<void>;
  fail(fault: "cut", method: string, path: string, more: { bytes: number; times?: number }): Promise<void>;
  /** Forgets the faults that are left. */
  failNone(): Promise<void>;
  /** How many requests are yet to fail. */
  faultsLeft(): Promise<number>;
  /** Lets time pass for idempotency keys and for counts of wrong passwords. */
  advance(seconds: number): Promise<void>;
  /** Ends it, as `await using` does. Fails if faults are left; a second call does nothing. */
  stop(): Promise<void>;
  /** After `stop()`, for the report of a test that failed: the last ten requests, and the end of the log. */
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
  /** Users to begin with, as `userd import` reads them, but with `password` in clear. */
  users?: Record<string, unknown>[];
  /** The context of a test of `node:test`: the service ends with the test, and explains its failure. */
  test?: TestContext;
  /** The path of the command, instead of the package's. */
  userd?: string;
}

/**
 * Starts a service on a free port, by the controls that `USERD_CONTROL` names; without it, this process starts one
 * `userd test` at the first call. `settings` are those of `userd --help`, such as `{ SCHEMA: "strict" }`; the environment
 * sets none. The service ends with this process at the latest.
 */
export function startUserd(settings?: Record<string, string | number | boolean>, options?: Options): Promise<Userd>;

/** Returns the path of the command. */
export function command(): string;
