"""Small models, comparisons and worlds that several tests share."""
