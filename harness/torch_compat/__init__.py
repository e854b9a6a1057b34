"""Parts of torch below its public interface: looked up in one place, each with what is lost without it."""
